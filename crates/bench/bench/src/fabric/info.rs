//! `aquifer fabric info`: lists RDMA devices.

use std::process::ExitCode;

use aquifer_fabric_verbs::{DeviceCaps, devices};

use aquifer_ipc::size::ByteSize;

/// Prints the devices. If there are none, prints the reason and returns 1.
pub fn info() -> ExitCode {
    match devices() {
        Ok(found) => {
            found.iter().for_each(|caps| aquifer::say::say!("{}", describe(caps)));
            ExitCode::SUCCESS
        }
        Err(reason) => {
            aquifer::say::say_error!("RDMA is not available: {reason}; shared memory and TCP do not need it");
            ExitCode::FAILURE
        }
    }
}

/// Description of a device.
pub fn describe(caps: &DeviceCaps) -> String {
    let yes = |is_so: bool| if is_so { "yes" } else { "no" };
    let lacks = caps.lacks();
    let fit = if lacks.is_empty() {
        "can lend and borrow".into()
    } else {
        format!("can borrow; to lend it lacks {}", lacks.join(", "))
    };
    let registration = if caps.registration_bytes < 1 << 56 {
        ByteSize(caps.registration_bytes).to_string()
    } else {
        "unlimited".into()
    };
    let mut text = format!("{}: {fit}\n", caps.name);
    for (what, value) in [
        ("queue pairs", caps.pairs.to_string()),
        ("operations in flight on each", caps.queue_depth.to_string()),
        (
            "READs and atomics in flight, as initiator and as target",
            format!("{} and {}", caps.reads_begun, caps.reads_served),
        ),
        ("shared receives", caps.shared_receives.to_string()),
        ("windows", format!("{}, bound to one queue pair: {}", caps.windows, yes(caps.has_bound_windows))),
        ("largest registration", registration),
        ("atomics", yes(caps.has_atomics).into()),
        ("on-demand paging (ODP)", yes(caps.has_odp).into()),
    ] {
        text += &format!("  {what}: {value}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_described_with_what_it_lacks() {
        let caps =
            DeviceCaps { name: "rxe0".into(), windows: 16_384, has_atomics: true, ..DeviceCaps::default() };
        let text = describe(&caps);
        let lacks = "rxe0: can borrow; to lend it lacks windows of type 2, shared receive queues\n";
        assert!(text.starts_with(lacks) && text.contains("16384"), "{text}");
        let caps = DeviceCaps { has_bound_windows: true, shared_receives: 100, ..caps };
        assert!(describe(&caps).starts_with("rxe0: can lend and borrow\n"));
    }
}
