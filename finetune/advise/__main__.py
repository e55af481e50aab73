"""`python -m finetune.advise` = `finetune advise`."""

from finetune.advise import main

raise SystemExit(main())
