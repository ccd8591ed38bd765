//! How often things happened in schedules.

macro_rules! counts {
    ($($(#[$about:meta])* $name:ident: $label:literal,)*) => {
        /// How often things happened in a schedule, or in all.
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
    taken_over_late: "next processes that have tried several times",
    too_late: "hosts that no process could resume, because another host has claimed them",
    recovered_nodes: "recoveries of a node",
    recoveries: "whole recoveries",
    ended_early: "recoveries that ended before they had come to all nodes",
    with_nodes_away: "recoveries that left nodes for later",
    overtaken: "recoveries that another one has overtaken",
    stops: "stopped hosts",
    suspensions: "suspended machines of hosts",
    all_cut: "times when all were cut off",
    directory_stops: "stops of the directory",
    lost_calls: "requests to the directory, or their answers, that are to be lost",
    node_stops: "stopped nodes",
    node_kills: "killed nodes",
    returned: "nodes that returned with their memory",
    renewed: "nodes that returned without their memory",
    late_nodes: "nodes that came late",
    lost_memory: "connections whose memory a host took for lost",
    adopted: "connections to what the process before has left",
}
