-- The write transactions of a catalog in one file, numbered. What was recorded is counted up to
-- each, also what was pruned since. The newest acknowledged one is noted beside the file.
CREATE TABLE write_commit (
    commit_number BIGINT NOT NULL,
    num_batches BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    newest_batch VARCHAR NOT NULL,
    recorded_at VARCHAR NOT NULL
);
INSERT INTO write_commit
SELECT
    0,
    count(*),
    coalesce(sum(num_rows), 0)::BIGINT,
    '',
    coalesce(strftime(max(recorded_at), '%Y-%m-%dT%H:%M:%SZ'), '')
FROM batch;

-- What was acknowledged, is gone, and was given up: the commits from the first number to the last,
-- and the newest batch among them.
CREATE TABLE accepted_loss (
    first_commit_number BIGINT NOT NULL,
    last_commit_number BIGINT NOT NULL,
    num_batches BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    newest_batch VARCHAR NOT NULL,
    recorded_at VARCHAR NOT NULL,
    accepted_at TIMESTAMP NOT NULL
);
