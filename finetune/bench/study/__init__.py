"""`finetune bench study`: the published study, repeated on this machine."""
