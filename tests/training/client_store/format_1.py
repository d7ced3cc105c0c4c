"""A store as the release before checksums of numbers wrote it: rounds 1, 3 and 4 of ten clients, pruned to round 1."""

FILES = {
    "store.sqlite": """
        CREATE TABLE progress (round_number INTEGER, oldest_round INTEGER);
        INSERT INTO "progress" VALUES(4,1);
        CREATE TABLE store (format_version INTEGER, num_clients INTEGER, num_shards INTEGER, layout TEXT,
        default_state BLOB, checksum INTEGER);
        INSERT INTO "store" VALUES(1,10,2,'{"x": ["<i8", []]}',X'FFFFFFFFFFFFFFFF',558161692);
    """,
    "shard_000.sqlite": """
        CREATE TABLE pruned (round_number INTEGER);
        INSERT INTO "pruned" VALUES(1);
        CREATE TABLE states (place INTEGER, round_number INTEGER, state BLOB, checksum INTEGER);
        INSERT INTO "states" VALUES(0,1,X'0A00000000000000',4108501921);
        INSERT INTO "states" VALUES(2,1,X'0C00000000000000',848153126);
        INSERT INTO "states" VALUES(4,1,X'0E00000000000000',1890110811);
        INSERT INTO "states" VALUES(0,3,X'1E00000000000000',202636400);
        INSERT INTO "states" VALUES(2,3,X'2000000000000000',2622799167);
        INSERT INTO "states" VALUES(2,4,X'2A00000000000000',227844599);
        CREATE UNIQUE INDEX states_by_place ON states (place, round_number);
        CREATE INDEX states_by_round ON states (round_number, place);
    """,
    "shard_001.sqlite": """
        CREATE TABLE pruned (round_number INTEGER);
        INSERT INTO "pruned" VALUES(1);
        CREATE TABLE states (place INTEGER, round_number INTEGER, state BLOB, checksum INTEGER);
        INSERT INTO "states" VALUES(1,1,X'0B00000000000000',944292671);
        INSERT INTO "states" VALUES(3,1,X'0D00000000000000',4264020664);
        INSERT INTO "states" VALUES(5,1,X'0F00000000000000',3154300357);
        INSERT INTO "states" VALUES(5,3,X'2300000000000000',316390108);
        INSERT INTO "states" VALUES(3,4,X'2B00000000000000',3242107241);
        CREATE UNIQUE INDEX states_by_place ON states (place, round_number);
        CREATE INDEX states_by_round ON states (round_number, place);
    """,
}
