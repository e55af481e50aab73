"""`python -m finetune.chat` = `finetune chat`."""

from finetune.chat import main

raise SystemExit(main())
