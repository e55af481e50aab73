"""`finetune bench study`: repeats the published study on this machine."""
