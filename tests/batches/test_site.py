"""Site of the Batch API: errors of the disk in words for the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from gateway.batches.site import BatchSite
from gateway.core.policy.batches import BatchesPolicy
from gateway.shared.storage import Storage, StorageError


def test_an_error_of_the_disk_names_the_folder_where_it_names_no_file(tmp_path: Path) -> None:
    nobody = cast(Any, None)
    site = BatchSite(BatchesPolicy(), Storage(tmp_path), nobody, nobody, nobody)
    assert site.told(OSError(28, "No space left on device")) == f"{tmp_path}/files: No space left on device"
    assert site.told(FileNotFoundError(2, "No such file", "/a")) == "/a: No such file"
    assert site.told(StorageError("why")) == "why"
