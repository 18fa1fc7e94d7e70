-- Places in lists of the last 10,000 files and batches that are gone, for clients that delete while they page.
CREATE TABLE gone (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    row INTEGER NOT NULL
) STRICT;
CREATE TRIGGER file_gone AFTER DELETE ON files BEGIN
    INSERT OR REPLACE INTO gone (id, tenant, row) VALUES (old.id, old.tenant, old.row);
END;
CREATE TRIGGER batch_gone AFTER DELETE ON batches BEGIN
    INSERT OR REPLACE INTO gone (id, tenant, row) VALUES (old.id, old.tenant, old.row);
END;
CREATE TRIGGER gone_comes AFTER INSERT ON gone BEGIN
    DELETE FROM gone WHERE number <= new.number - 10000;
END;
