-- A profiling session or an import.
CREATE TABLE run (
    run_id VARCHAR PRIMARY KEY,
    kind VARCHAR NOT NULL,
    tool VARCHAR NOT NULL,
    content_hash VARCHAR NOT NULL,
    source VARCHAR NOT NULL,
    licence VARCHAR NOT NULL,
    environment MAP(VARCHAR, VARCHAR) NOT NULL,
    started_at TIMESTAMP NOT NULL
);

-- The receipt of every stored batch: what makes a retry harmless.
CREATE TABLE batch (
    run_id VARCHAR NOT NULL,
    batch_index BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    num_flagged BIGINT NOT NULL,
    num_failed BIGINT NOT NULL,
    is_last BOOLEAN NOT NULL,
    recorded_at TIMESTAMP NOT NULL,
    PRIMARY KEY (run_id, batch_index)
);

-- Every measurement of every operator. It has no key of its own (one would cost a third of the
-- ingest rate): batches are unique, and a row is its batch and its place in it.
CREATE TABLE measurement (
    run_id VARCHAR NOT NULL,
    batch_index BIGINT NOT NULL,
    row_index BIGINT NOT NULL,
    operator VARCHAR NOT NULL,
    phase VARCHAR NOT NULL,
    dtype VARCHAR NOT NULL,
    dims MAP(VARCHAR, BIGINT) NOT NULL,
    device VARCHAR NOT NULL,
    topology VARCHAR,
    framework VARCHAR,
    framework_version VARCHAR,
    kernel VARCHAR,
    latency_us_median DOUBLE,
    latency_us_mean DOUBLE,
    latency_us_min DOUBLE,
    latency_us_max DOUBLE,
    latency_us_std DOUBLE,
    latency_us_p10 DOUBLE,
    latency_us_p90 DOUBLE,
    num_samples BIGINT,
    power_w DOUBLE,
    clock_mhz DOUBLE,
    status VARCHAR NOT NULL,
    status_reason VARCHAR,
    flags VARCHAR[],
    source_file VARCHAR,
    source_hash VARCHAR,
    source_row BIGINT
);

-- A run is complete when its last batch and all before it are stored.
CREATE VIEW run_state AS
SELECT
    run.*,
    coalesce(total.num_rows, 0) AS num_rows,
    coalesce(total.num_flagged, 0) AS num_flagged,
    coalesce(total.num_failed, 0) AS num_failed,
    CASE WHEN total.num_batches = total.last_index + 1 THEN total.recorded_at END AS completed_at
FROM run
LEFT JOIN (
    SELECT
        run_id,
        sum(num_rows)::BIGINT AS num_rows,
        sum(num_flagged)::BIGINT AS num_flagged,
        sum(num_failed)::BIGINT AS num_failed,
        count(*) AS num_batches,
        max(batch_index) FILTER (is_last) AS last_index,
        max(recorded_at) AS recorded_at
    FROM batch
    GROUP BY run_id
) AS total ON total.run_id = run.run_id;

-- What readers see: an import only as a whole, a profile as it grows.
CREATE VIEW readable_measurement AS
SELECT *
FROM measurement
WHERE run_id IN (
    SELECT run_id FROM run_state WHERE kind = 'profile' OR completed_at IS NOT NULL
);
