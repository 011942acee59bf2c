"""The same services over HTTP: calls as JSON, and pages."""
