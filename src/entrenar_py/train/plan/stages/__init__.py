"""`entrenar pipeline`: which machine gets which blocks, as planned, asked for, or converted."""
