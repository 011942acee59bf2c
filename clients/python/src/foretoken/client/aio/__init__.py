"""The clients for asyncio: the same methods, awaited; streams are asynchronous iterators."""
