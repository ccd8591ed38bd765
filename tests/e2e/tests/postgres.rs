//! PostgreSQL, which forks for each client, with a quarter of the memory of its queries.

use aquifer_tests_e2e::SharedCluster;
use aquifer_tests_e2e::postgres::Postgres;
use aquifer_tests_e2e::restart::figure;

/// A quarter of the memory that the query needs.
const LIMIT: &str = "40M";
/// A query with hashes and sorts.
const QUERY: &str = "SELECT count(*), sum(n), md5(string_agg(h, '' ORDER BY h)) FROM \
    (SELECT md5((j % 300000)::text) AS h, count(*) AS n FROM generate_series(1, 600000) AS s(j) GROUP BY \
    1) AS g";

mod long {
    use super::*;

    #[test]
    fn postgres_keeps_its_data() {
        assert!(rustix::process::geteuid().is_root(), "needs root, to start PostgreSQL as another user");
        let shared = SharedCluster::up();
        let postgres = Postgres::start(&shared, LIMIT);
        postgres.fill_tables();
        let _ = postgres.ask("pgbench", &["-n", "-c", "4", "-t", "100"]);
        postgres.assert_balances(400);
        let in_memory = postgres.query(&format!("SET work_mem = '1GB'; {QUERY}"));
        assert!(in_memory.starts_with("300000|600000|"), "{in_memory}");
        // PostgreSQL has most data in files.
        assert_eq!(postgres.query(&format!("SET work_mem = '64kB'; {QUERY}")), in_memory);
        let evictions = figure(&shared.cluster, "evictions").expect("the agent answers");
        assert!(evictions > 1000, "nothing was paged");
        postgres.stop().assert_success("PostgreSQL on the pool");
        shared.cluster.assert_all_free();
    }
}
