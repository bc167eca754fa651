"""The options of the systems that fine-tune, for the table; `finetuned.asked` reads them."""

TUNED = (
    *("task", "method", "family", "rank", "alpha", "class_weights", "oversample"),
    *("strategy", "facts"),
)
