"""What a notebook's code does: data flow, roles, kinds."""
