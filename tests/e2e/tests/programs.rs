//! Common programs with a quarter of their memory.

use aquifer_tests_e2e::redis::{PYTHON, Redis};
use aquifer_tests_e2e::{Case, Cluster, build, compare};

const REDIS_BYTES: &str = "150M";

fn check_python(script: &str) {
    let script = build::sources().join(script);
    let cluster = Cluster::up(3, "512M");
    let program = [PYTHON, script.to_str().expect("a plain path")];
    compare(&cluster, Case { program: &program, forks: false });
}

mod long {
    use super::*;

    #[test]
    fn sqlite_in_memory() {
        check_python("sqlite_check.py");
    }

    #[test]
    fn python_with_numpy() {
        check_python("numpy_check.py");
    }

    #[test]
    fn redis_with_bgsave() {
        let cluster = Cluster::up(3, "512M");
        let folders = ["plain", "paged"].map(|name| cluster.state().join(name));
        for folder in &folders {
            std::fs::create_dir(folder).expect("a folder can be made");
        }
        let plain = Redis::plain(&folders[0]);
        let expected = plain.check("load", REDIS_BYTES);
        let plain = plain.stop();
        plain.assert_success("redis-server, plainly,");

        let limit = plain.peak.anonymous_bytes / 4;
        let paged = Redis::paged(&cluster, &folders[1], limit);
        assert_eq!(paged.check("load", REDIS_BYTES), expected, "what was loaded and read back");
        paged.stop().assert_success("redis-server on the pool");
        cluster.assert_all_free();

        let loaded = Redis::plain(&folders[1]);
        assert_eq!(
            loaded.check("verify", REDIS_BYTES),
            expected,
            "what the forked child of the paged server saved"
        );
        loaded.stop().assert_success("redis-server with the dump");
    }
}
