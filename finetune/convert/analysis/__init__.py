"""What a notebook's code does: data flow, objects, kinds."""
