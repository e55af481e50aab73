"""`python -m finetune.bench` = `finetune bench`."""

from finetune.bench import main

raise SystemExit(main())
