-- What the device was like while a row was measured, and which of its kernels ran.
DROP VIEW readable_measurement;
ALTER TABLE measurement ADD COLUMN temperature_c DOUBLE;
ALTER TABLE measurement ADD COLUMN throttle VARCHAR;
ALTER TABLE measurement ADD COLUMN kernel_name VARCHAR;

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
