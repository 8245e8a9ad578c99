"""The data room: text -> tokens -> shards -> packed rows -> one fixed order -> micro-batches.

    sources, corpus, pysrc, parquet   where documents come from
    tokenizer, words                  text to ids
    build, encode, workers, cache     documents to token shards, once per machine
    shards, packing, rows             token shards, or ready-made rows, as (S,) training rows
    blend, order                      which row comes when: a pure function of (seed, epoch, global index)
    loader, prefetch, validation      the rows of one optimizer step for one data-parallel rank
    open                              a data set by its name in the TOML

This file imports nothing: building shards needs no torch.
"""
