"""What a training held out, as data and as a page with pictures."""
