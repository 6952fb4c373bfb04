BIN := .venv/bin

.PHONY: install test lint bench

install:
	bash scripts/install.sh

test: install
	bash scripts/test.sh

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc tests -regex '.*\.\(h\|cpp\|cu\)' -exec $(BIN)/clang-format --dry-run --Werror {} +
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyrefly check

bench: install
	$(BIN)/python benchmarks/bench_step.py
