-- Batches and reviews are numbered by one counter, the catalog's clock: what was readable at a
-- moment is what had a number up to then.
DROP VIEW readable_measurement;
DROP VIEW run_state;

CREATE TABLE numbered_batch (
    batch_number BIGINT NOT NULL,
    run_id VARCHAR NOT NULL,
    batch_index BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    num_flagged BIGINT NOT NULL,
    num_failed BIGINT NOT NULL,
    is_last BOOLEAN NOT NULL,
    recorded_at TIMESTAMP NOT NULL,
    PRIMARY KEY (run_id, batch_index)
);
INSERT INTO numbered_batch
SELECT row_number() OVER (ORDER BY recorded_at, run_id, batch_index), * FROM batch;

-- A row is its batch and its place in it. The dimensions lie in the operator's canonical order.
CREATE TABLE numbered_measurement (
    batch_number BIGINT NOT NULL,
    row_index BIGINT NOT NULL,
    operator VARCHAR NOT NULL,
    phase VARCHAR NOT NULL,
    dtype VARCHAR NOT NULL,
    d0 BIGINT,
    d1 BIGINT,
    d2 BIGINT,
    d3 BIGINT,
    d4 BIGINT,
    d5 BIGINT,
    d6 BIGINT,
    d7 BIGINT,
    d8 BIGINT,
    d9 BIGINT,
    d10 BIGINT,
    d11 BIGINT,
    device VARCHAR NOT NULL,
    topology VARCHAR,
    framework VARCHAR,
    framework_version VARCHAR,
    kernel VARCHAR,
    variant VARCHAR,
    model VARCHAR,
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
INSERT INTO numbered_measurement
SELECT
    numbered_batch.batch_number,
    measurement.row_index,
    measurement.operator,
    measurement.phase,
    measurement.dtype,
    map_values(measurement.dims)[1],
    map_values(measurement.dims)[2],
    map_values(measurement.dims)[3],
    map_values(measurement.dims)[4],
    map_values(measurement.dims)[5],
    map_values(measurement.dims)[6],
    map_values(measurement.dims)[7],
    map_values(measurement.dims)[8],
    map_values(measurement.dims)[9],
    map_values(measurement.dims)[10],
    map_values(measurement.dims)[11],
    map_values(measurement.dims)[12],
    measurement.device,
    measurement.topology,
    measurement.framework,
    measurement.framework_version,
    measurement.kernel,
    NULL,
    NULL,
    measurement.latency_us_median,
    measurement.latency_us_mean,
    measurement.latency_us_min,
    measurement.latency_us_max,
    measurement.latency_us_std,
    measurement.latency_us_p10,
    measurement.latency_us_p90,
    measurement.num_samples,
    measurement.power_w,
    measurement.clock_mhz,
    measurement.status,
    measurement.status_reason,
    measurement.flags,
    measurement.source_file,
    measurement.source_hash,
    measurement.source_row
FROM measurement
JOIN numbered_batch USING (run_id, batch_index)
ORDER BY numbered_batch.batch_number, measurement.row_index;

-- The views per operator read what is replaced here; they are made anew at every opening.
DROP TABLE measurement;
DROP TABLE batch;
ALTER TABLE numbered_batch RENAME TO batch;
ALTER TABLE numbered_measurement RENAME TO measurement;

-- Judgements of stored rows, apart from the rows: those never change.
CREATE TABLE review (
    review_number BIGINT NOT NULL,
    operator VARCHAR NOT NULL,
    device VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    num_rows BIGINT NOT NULL,
    recorded_at TIMESTAMP NOT NULL
);

-- A doubt of a review about a row, from one moment to another; `until` is NULL while it lasts.
CREATE TABLE doubt (
    batch_number BIGINT NOT NULL,
    row_index BIGINT NOT NULL,
    flag VARCHAR NOT NULL,
    since BIGINT NOT NULL,
    until BIGINT
);

-- A filter and the moment it was applied at. Empty strings mean any.
CREATE TABLE snapshot (
    content_hash VARCHAR PRIMARY KEY,
    as_of BIGINT NOT NULL,
    num_rows BIGINT NOT NULL,
    operator VARCHAR NOT NULL,
    device VARCHAR NOT NULL,
    topology VARCHAR NOT NULL,
    framework VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    model VARCHAR NOT NULL,
    include_failed BOOLEAN NOT NULL,
    include_flagged BOOLEAN NOT NULL,
    created_at TIMESTAMP NOT NULL
);

CREATE TABLE snapshot_holder (
    content_hash VARCHAR NOT NULL,
    holder VARCHAR NOT NULL,
    held_at TIMESTAMP NOT NULL
);

-- A run is complete when its last batch and all before it are stored; `completed_by` is the number
-- of the batch that completed it.
CREATE VIEW run_state AS
SELECT
    run.*,
    coalesce(total.num_rows, 0) AS num_rows,
    coalesce(total.num_flagged, 0) AS num_flagged,
    coalesce(total.num_failed, 0) AS num_failed,
    CASE WHEN total.num_batches = total.last_index + 1 THEN total.recorded_at END AS completed_at,
    CASE WHEN total.num_batches = total.last_index + 1 THEN total.last_number END AS completed_by
FROM run
LEFT JOIN (
    SELECT
        run_id,
        sum(num_rows)::BIGINT AS num_rows,
        sum(num_flagged)::BIGINT AS num_flagged,
        sum(num_failed)::BIGINT AS num_failed,
        count(*) AS num_batches,
        max(batch_index) FILTER (is_last) AS last_index,
        max(batch_number) AS last_number,
        max(recorded_at) AS recorded_at
    FROM batch
    GROUP BY run_id
) AS total ON total.run_id = run.run_id;

-- What readers see now: an import only as a whole, a profile as it grows, with present doubts.
CREATE VIEW readable_measurement AS
SELECT
    batch.run_id,
    batch.batch_index,
    batch.recorded_at,
    measurement.* EXCLUDE (flags),
    CASE
        WHEN doubted.flags IS NULL THEN measurement.flags
        ELSE list_concat(measurement.flags, doubted.flags)
    END AS flags
FROM measurement
JOIN (
    SELECT batch.batch_number, batch.run_id, batch.batch_index, batch.recorded_at
    FROM batch
    JOIN run_state USING (run_id)
    WHERE run_state.kind = 'profile' OR run_state.completed_at IS NOT NULL
) AS batch USING (batch_number)
LEFT JOIN (
    SELECT batch_number, row_index, list(flag) AS flags
    FROM doubt
    WHERE until IS NULL
    GROUP BY batch_number, row_index
) AS doubted USING (batch_number, row_index);
