"""Between the domain and the wire: Arrow, protobuf and gRPC status."""
