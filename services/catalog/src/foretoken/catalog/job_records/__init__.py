"""Jobs of services, which their processes share by way of the catalog."""
