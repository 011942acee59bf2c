-- Files of other services. At most one of a kind is active. `created_at` is ISO 8601, as its owner
-- wrote it.
CREATE TABLE artifact (
    kind VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    content_hash VARCHAR NOT NULL,
    num_bytes BIGINT NOT NULL,
    created_at VARCHAR NOT NULL,
    metadata_json VARCHAR NOT NULL,
    is_active BOOLEAN NOT NULL,
    PRIMARY KEY (kind, name)
);

-- Their content, in pieces. A piece is known by its file and the place of its first byte there.
CREATE TABLE artifact_chunk (
    kind VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    first_byte BIGINT NOT NULL,
    content BLOB NOT NULL
);
