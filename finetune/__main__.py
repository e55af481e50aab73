"""`python -m finetune COMMAND` = `finetune COMMAND`."""

from finetune.cli import main

raise SystemExit(main())
