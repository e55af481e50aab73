"""`python -m finetune.review` = `finetune review`."""

from finetune.review import main

raise SystemExit(main())
