//! Metrics of an agent and a node that page a program, fetched as Prometheus does.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::network::RunningDaemon;
use aquifer_tests_e2e::run::Running;
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use aquifer_tests_support::openmetrics::{MetricSamples, scrape, send_request};
use aquifer_tests_support::state_folder;

const LIMIT: &str = "32M";
/// Memory of the cluster's own node. The rest of the program is on the node that is scraped.
const OWN: &str = "64M";
const FAULTS: &str = "aquifer_agent_faults_total";

fn checker(cluster: &Cluster, rounds: &str) -> Running {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "128M", "--rounds", rounds];
    Running::start(&mut cluster.run_command(LIMIT, &program), false, Box::new(|| 0))
}

fn free_port() -> String {
    let held = TcpListener::bind("127.0.0.1:0").expect("a free port");
    held.local_addr().expect("it is bound").to_string()
}

/// Scrapes until the sum of a metric exceeds `than`, and returns that scrape.
fn until_more(place: &str, name: &str, than: f64) -> MetricSamples {
    eventually(&format!("{name} above {than}"), || {
        let samples = scrape(place).unwrap_or_else(|why| panic!("{why}"));
        (samples.sum(name, &[])? > than).then_some(samples)
    })
}

fn agent(cluster: &Cluster, place: &str) -> RunningDaemon {
    // Without a page cache, from which no page is read from nodes.
    RunningDaemon::start_here(cluster.state(), &["agent", "--cache-per-user", "0", "--metrics", place])
}

/// Sends invalid requests to the metrics server of the agent.
fn hostile(place: &str) {
    let mut open = Vec::new();
    for said in [
        "",
        "GET /metrics HTTP/1.1\r\n",
        "POST /metrics HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n",
        "\0\0\0",
    ] {
        for _ in 0..8 {
            let mut stream = TcpStream::connect(place).expect("it listens");
            let _gone = stream.write_all(said.as_bytes());
            open.push(stream);
        }
    }
    let flood = vec![b'x'; 4 << 20];
    let _cut_off = TcpStream::connect(place).expect("it listens").write_all(&flood);
    let get = |line: &str| send_request(place, format!("{line} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
    assert_eq!(get("GET /").expect("an answer").status, 404);
    assert_eq!(get("POST /metrics").expect("an answer").status, 405);
    assert!(scrape(place).is_ok());
}

#[test]
fn metrics_are_served_on_this_machine_only() {
    let state = state_folder();
    let said = |words: &[&str]| {
        let mut command = Command::new(build::binary());
        let output = command.arg("--state").arg(state.path()).args(words).output();
        let output = output.expect("aquifer can be started");
        assert!(!output.status.success());
        text(&output.stderr)
    };
    for part in [&["agent"][..], &["node", "--id", "1", "--memory", "8M"]] {
        let why = said(&[part, &["--metrics", "0.0.0.0:7480"]].concat());
        assert!(why.contains("other machines") && why.contains("unix:PATH") && why.contains("TLS"), "{why}");
        let file = state.path().join("settings.toml");
        std::fs::write(&file, "metrics = \"[::]:7480\"\n").expect("a temporary file can be written");
        let why = said(&[part, &["--config", file.to_str().expect("a plain path")]].concat());
        assert!(why.contains("settings.toml") && why.contains("other machines"), "{why}");
    }
    // An address in use is reported before the node lends memory.
    let held = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let place = held.local_addr().expect("it is bound").to_string();
    let why = said(&["node", "--id", "1", "--memory", "8M", "--metrics", &place]);
    assert!(why.contains(&place) && why.contains("--metrics"), "{why}");
}

mod long {
    use super::*;

    #[test]
    fn metrics_of_a_program_grow_at_the_agent_and_at_the_node() {
        let cluster = Cluster::up_with(1, OWN, &["--fabric", "tcp"]);
        let socket = cluster.state().join("node.metrics");
        let node_place = format!("unix:{}", socket.display());
        let words =
            ["node", "--id", "2", "--memory", "256M", "--listen", "127.0.0.1:0", "--metrics", &node_place];
        let node = RunningDaemon::start_here(cluster.state(), &words);
        processes::kill(cluster.daemon("agent", None));
        let place = free_port();
        let first = agent(&cluster, &place);
        let idle = scrape(&place).expect("they are right");
        assert_eq!(idle.sum("aquifer_agent_nodes", &[]), Some(2.0));
        assert_eq!(idle.sum(FAULTS, &[]), None, "there are no runs");

        let run = checker(&cluster, "40");
        let samples = until_more(&place, FAULTS, 1000.0);
        let before = samples.sum(FAULTS, &[]).expect("there is a run");
        let own = rustix::process::geteuid().as_raw().to_string();
        assert!(
            samples.of(FAULTS, &[("tenant", &own)]).next().is_some_and(|run| run.labels.contains_key("run"))
        );
        assert_eq!(samples.sum("aquifer_agent_run_name", &[("name", "checker")]), Some(1.0));
        assert_eq!(samples.sum("aquifer_agent_limit_bytes", &[]), Some(f64::from(32 << 20)));
        assert_eq!(
            samples.sum("aquifer_agent_fault_latency_seconds_bucket", &[("le", "+Inf")]),
            samples.sum("aquifer_agent_fault_latency_seconds_count", &[])
        );
        until_more(&place, FAULTS, before);
        until_more(&place, "aquifer_agent_remote_reads_total", 0.0);
        until_more(&place, "aquifer_agent_tenant_remote_bytes", 0.0);

        let of_node = until_more(&node_place, "aquifer_node_served_bytes_total", 0.0);
        let sum = |name: &str| of_node.sum(name, &[]).expect(name);
        assert!(sum("aquifer_node_free_bytes") < sum("aquifer_node_memory_bytes"));
        assert!(sum("aquifer_node_endpoints") > 0.0 && sum("aquifer_node_operations_total") > 0.0);
        assert!(of_node.sum("aquifer_node_operations_total", &[("tenant", &own)]).is_some());
        let bytes = sum("aquifer_node_served_bytes_total");
        until_more(&node_place, "aquifer_node_served_bytes_total", bytes);

        // The next agent serves metrics of the same run at the same address, counted from 0.
        let runs = |samples: &MetricSamples| {
            samples.of(FAULTS, &[]).filter_map(|sample| sample.labels.get("run").cloned()).collect::<Vec<_>>()
        };
        let known = runs(&samples);
        first.kill();
        let second = agent(&cluster, &place);
        assert_eq!(runs(&until_more(&place, FAULTS, 0.0)), known);
        hostile(&place);
        run.wait().assert_success("the checker that was watched");

        until_more(&place, "aquifer_agent_lease_renewals_total", 0.0);
        // The counters of ended runs are those of their tenant, and there is no run.
        let after = eventually("the run to be gone", || {
            scrape(&place).ok().filter(|samples| samples.sum(FAULTS, &[]).is_none())
        });
        assert!(
            after.sum("aquifer_agent_tenant_faults_total", &[("tenant", &own)]).is_some_and(|sum| sum > 0.0)
        );
        assert_eq!(after.sum("aquifer_agent_tenant_runs", &[]), Some(0.0));
        // The node clears the freed memory over its own fabric.
        until_more(&node_place, "aquifer_node_cleared_bytes_total", 0.0);
        let status = cluster.status();
        let tenant = &status["agent"]["tenants"][0];
        assert_eq!(tenant["tenant"].as_u64().map(|tenant| tenant.to_string()), Some(own));
        assert!(tenant["faults"].as_u64() > Some(0) && tenant["runs"].as_u64() == Some(0), "{tenant}");
        drop(second);
        drop(node);
        assert!(!socket.exists() && scrape(&place).is_err());
        // All daemons of the cluster are stopped.
        let up = cluster.command().arg("up").output().expect("aquifer can be started");
        assert!(up.status.success(), "{}", text(&up.stderr));
    }
}
