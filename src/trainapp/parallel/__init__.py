"""Several ranks: the groups in which they communicate, and how the model is spread over them."""
