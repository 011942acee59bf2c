-- Whole attention blocks have up to eighteen dimensions.
ALTER TABLE measurement ADD COLUMN d12 BIGINT;
ALTER TABLE measurement ADD COLUMN d13 BIGINT;
ALTER TABLE measurement ADD COLUMN d14 BIGINT;
ALTER TABLE measurement ADD COLUMN d15 BIGINT;
ALTER TABLE measurement ADD COLUMN d16 BIGINT;
ALTER TABLE measurement ADD COLUMN d17 BIGINT;
