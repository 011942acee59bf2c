"""From a model and a batch to the operators of one rank."""
