//! Counts of events in schedules.

macro_rules! counts {
    ($($(#[$about:meta])* $name:ident: $label:literal,)*) => {
        /// Counts of events in a schedule, or in all schedules.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct MembershipCounts {
            $($(#[$about])* pub $name: u64,)*
        }

        impl MembershipCounts {
            pub fn labelled(&self) -> Vec<(&'static str, u64)> {
                vec![$(($label, self.$name)),*]
            }

            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    operations: "operations",
    cut_off: "operations of hosts that are cut off from the directory",
    after_lease: "operations of hosts whose lease has ended",
    without_node_lease: "operations on nodes whose lease has ended",
    waits: "operations that wait",
    fenced: "hosts that were fenced when they used a node",
    fenced_by_nodes: "fences that nodes have set",
    leases_lost: "leases that hosts have lost",
    resumed: "hosts that a next process has resumed",
    taken_over_late: "next processes that took over after several attempts",
    too_late: "hosts that no process could resume, because another host has claimed them",
    recovered_nodes: "recoveries of a node",
    recoveries: "whole recoveries",
    ended_early: "recoveries that ended before they had recovered all nodes",
    with_nodes_away: "recoveries that left nodes for later",
    overtaken: "recoveries that another one has overtaken",
    stops: "stopped hosts",
    suspensions: "suspended machines of hosts",
    all_cut: "cuts of all hosts and nodes",
    directory_stops: "stops of the directory",
    lost_calls: "requests to the directory, or their answers, that are to be lost",
    node_stops: "stopped nodes",
    node_kills: "killed nodes",
    returned: "nodes that returned with their memory",
    renewed: "nodes that returned without their memory",
    late_nodes: "nodes that started late",
    lost_memory: "connections whose memory a host treated as lost",
    adopted: "connections to extents of the previous process",
}
