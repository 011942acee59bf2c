"""The pages: a function each, which takes a visit and returns what its template shows."""
