"""What a training step really does: its record, its lines, and known anti-patterns seen in it.

```
rank files -> Record (record) -> Anatomy (steps) -> Suspects (suspects) -> text, JSON, page
```

`check/observing/auto/anatomy/` writes the files in the script's processes. All else is computed
from them, without torch: `steps` cuts a record into steps, folds repeated lines and compares steps
and ranks; `suspects` is a table of functions that each look for one anti-pattern.
"""
