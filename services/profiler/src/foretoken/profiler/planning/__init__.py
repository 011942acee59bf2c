"""What is to be timed: the calls of a request less what is known, and how long they take."""
