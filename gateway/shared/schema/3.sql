-- Results stand in files alone: a line is there until it has its result. `output_bytes`, `error_bytes`: of the files of
-- a batch that is not over. `kept`: bytes that a batch counts as. Lines that had their results in the database are sent
-- again.
DROP TABLE batch_results;
ALTER TABLE batches ADD COLUMN output_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN error_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN kept INTEGER NOT NULL DEFAULT 1024;
UPDATE batches SET completed = 0, failed = 0, status = replace(status, 'finalizing', 'in_progress')
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
-- What each tenant has on the disk, kept by the triggers.
CREATE TABLE kept (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO kept SELECT tenant, sum(size) FROM (
    SELECT tenant, max(bytes, 16384) AS size FROM files UNION ALL SELECT tenant, kept FROM batches
) GROUP BY tenant;
CREATE TRIGGER file_comes AFTER INSERT ON files BEGIN
    INSERT INTO kept VALUES (new.tenant, max(new.bytes, 16384))
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER file_goes AFTER DELETE ON files BEGIN
    UPDATE kept SET bytes = bytes - max(old.bytes, 16384) WHERE tenant = old.tenant;
END;
CREATE TRIGGER batch_comes AFTER INSERT ON batches BEGIN
    INSERT INTO kept VALUES (new.tenant, new.kept)
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER batch_changes AFTER UPDATE OF kept ON batches BEGIN
    UPDATE kept SET bytes = bytes + new.kept - old.kept WHERE tenant = new.tenant;
END;
CREATE TRIGGER batch_goes AFTER DELETE ON batches BEGIN
    UPDATE kept SET bytes = bytes - old.kept WHERE tenant = old.tenant;
END;
