"""Python clients of the services, and the `Foretoken` facade."""
