"""The notebooks executed in order, without a browser: kept apart, recorded, stopped and gone on with."""

from lmcore.workbook.record import read_record, unfinished, update_plan
from lmcore.workbook.run import WorkbookResult, refresh, run_workbook

__all__ = ["WorkbookResult", "read_record", "refresh", "run_workbook", "unfinished", "update_plan"]
