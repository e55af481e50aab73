from finetune.init.command import main

raise SystemExit(main())
