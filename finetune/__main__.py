"""`python -m finetune VERB` = `finetune VERB`."""

from finetune.cli import main

raise SystemExit(main())
