from finetune.export.command import main

raise SystemExit(main())
