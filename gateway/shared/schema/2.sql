-- The Batch API, of gateway/batches/tables.py. Times are Unix seconds.
CREATE TABLE files (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL
) STRICT;
CREATE INDEX files_of_tenant ON files (tenant, row);
CREATE TABLE batches (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    keep_until INTEGER NOT NULL,
    times TEXT NOT NULL DEFAULT '{}',
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT,
    error_file_id TEXT,
    errors BLOB,
    metadata BLOB
) STRICT;
CREATE INDEX batches_of_tenant ON batches (tenant, row);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE batch_lines (
    batch INTEGER NOT NULL REFERENCES batches (row) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    start INTEGER NOT NULL,
    length INTEGER NOT NULL,
    PRIMARY KEY (batch, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE batch_results (
    batch INTEGER NOT NULL,
    number INTEGER NOT NULL,
    good INTEGER NOT NULL,
    text BLOB NOT NULL,
    PRIMARY KEY (batch, number),
    FOREIGN KEY (batch, number) REFERENCES batch_lines (batch, number) ON DELETE CASCADE
) STRICT;
