"""The tables of the index. A file of another `VERSION` is thrown away and built again: it holds nothing of its own."""

VERSION = 1

SCHEMA = """
CREATE TABLE files (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER) WITHOUT ROWID;
CREATE TABLE rollouts (
    step INTEGER, line INTEGER, offset INTEGER, size INTEGER, env_name TEXT, example_id TEXT, group_id TEXT,
    trajectory_id TEXT, state TEXT, advantage REAL, reward REAL, failure TEXT, num_tokens INTEGER,
    num_sampled_tokens INTEGER, oldest_version INTEGER, newest_version INTEGER, PRIMARY KEY (step, line)
) WITHOUT ROWID;
CREATE INDEX rollouts_by_group ON rollouts (group_id);
CREATE INDEX rollouts_by_trajectory ON rollouts (trajectory_id);
CREATE TABLE groups (
    group_id TEXT, step INTEGER, env_name TEXT, example_id TEXT, state TEXT, num_rollouts INTEGER, num_failed INTEGER,
    reward_mean REAL, reward_min REAL, reward_max REAL, spread REAL, num_tokens INTEGER, PRIMARY KEY (step, group_id)
) WITHOUT ROWID;
CREATE INDEX groups_by_id ON groups (group_id);
CREATE INDEX groups_by_spread ON groups (spread DESC, step DESC);
CREATE INDEX groups_by_reward ON groups (reward_mean);
CREATE INDEX groups_by_example ON groups (env_name, example_id);
CREATE TABLE tokens (
    step INTEGER, rank INTEGER, line INTEGER, offset INTEGER, size INTEGER, row INTEGER, env_name TEXT, group_id TEXT,
    trajectory_id TEXT, step_index INTEGER, micro_batch INTEGER, position INTEGER, micro_batch_tokens INTEGER,
    num_tokens INTEGER, num_loss_tokens INTEGER, num_masked INTEGER, reward REAL, advantage REAL, max_ratio REAL,
    min_ratio REAL, max_kl REAL, max_entropy REAL, PRIMARY KEY (step, rank, line)
) WITHOUT ROWID;
CREATE INDEX tokens_by_trajectory ON tokens (trajectory_id);
CREATE INDEX tokens_by_group ON tokens (group_id);
CREATE INDEX tokens_by_ratio ON tokens (max_ratio DESC);
CREATE INDEX tokens_by_kl ON tokens (max_kl DESC);
"""

GROUPS_OF_STEP = """
INSERT INTO groups
SELECT group_id, step, MIN(env_name), MIN(example_id),
    COALESCE(MIN(CASE WHEN failure IS NULL THEN state END), 'failed'),
    COUNT(*), COUNT(failure), AVG(reward), MIN(reward), MAX(reward), MAX(reward) - MIN(reward), SUM(num_tokens)
FROM rollouts WHERE step = ? GROUP BY group_id
"""
