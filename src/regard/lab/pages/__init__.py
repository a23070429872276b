"""Runs, comparisons and translators on the page: what `regard view` and `regard demo` show of them."""

from regard.lab.pages.run_folders import folder_of, open_folder
from regard.lab.pages.translations import TRANSLATED, is_run, live_model, translated_sheets
from regard.lab.runs import pretrained_runs

__all__ = ["TRANSLATED", "folder_of", "is_run", "live_model", "open_folder", "pretrained_runs", "translated_sheets"]
