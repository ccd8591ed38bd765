//! Random schedules.

use aquifer_directory::Directory;
use aquifer_directory::sim::CallFault;
use aquifer_fabric::sim::Rng;

use super::counts::MembershipCounts;
use super::world::{GracePeriods, World};

/// Chooses the grace times and the numbers of hosts and nodes of a schedule.
fn world(seed: u64) -> World {
    let mut rng = Rng::new(seed ^ 0x6d65_6d62);
    let kept = |rng: &mut Rng| [0, 4_000, 20_000][rng.index(3)];
    let nodes_ms = [kept(&mut rng), kept(&mut rng), kept(&mut rng)];
    let grace = GracePeriods { host_ms: [2_000, 10_000][rng.index(2)], nodes_ms };
    World::new(seed, grace, 1 + u16::try_from(rng.below(3)).unwrap(), 2 + rng.index(3))
}

/// Plays one schedule.
pub fn run(seed: u64) -> Result<MembershipCounts, String> {
    let mut world = world(seed);
    // The other nodes start later.
    world.nodes[0].start(0).map_err(|error| error.to_string())?;
    let turns = 100 + world.rng.below(200);
    for _ in 0..turns {
        world.turn()?;
    }
    world.end()?;
    Ok(world.counts)
}

impl World {
    fn turn(&mut self) -> Result<(), String> {
        let host = self.rng.index(self.machines.len());
        let node = self.rng.index(self.nodes.len());
        match self.rng.below(24) {
            0..9 => self.host_turn(host)?,
            9..13 => {
                let ms = 500 + self.rng.below(3_000);
                self.pass_time(ms, |rng| rng.chance(3, 4))?;
            }
            13..15 => self.node_turn(node),
            15..18 => {
                let ends_early = self.rng.chance(1, 8);
                self.recover(host, ends_early)?;
            }
            18 if self.rng.chance(1, 2) => self.cut_or_heal(host, node),
            18 => self.lose_call(host, node),
            19 if self.rng.chance(1, 3) => {
                let is_resumed = self.rng.chance(3, 4);
                self.kill_host(host, is_resumed);
            }
            23 if self.rng.chance(1, 6) => self.die_twice(host)?,
            20 if self.rng.chance(1, 2) => self.stop_or_continue(host),
            21 if self.rng.chance(1, 3) => self.kill_node(node),
            22 if self.rng.chance(1, 2) => {
                let is_stopped = !self.nodes[node].is_stopped;
                self.counts.node_stops += u64::from(is_stopped && self.nodes[node].is_running);
                self.nodes[node].set_stopped(is_stopped, self.now_ms);
            }
            _ => {}
        }
        Ok(())
    }

    fn host_turn(&mut self, index: usize) -> Result<(), String> {
        if self.machines[index].host.is_some() || self.machines[index].is_halted() {
            return self.use_memory(index);
        }
        let fault = self.rng.chance(1, 4).then(|| (1 + self.small(), self.fault()));
        self.start_host(index, fault)
    }

    /// Advances a node, or starts its process.
    fn node_turn(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if node.is_running {
            return self.node_tick(index);
        }
        let (is_kept, is_first) = (node.memory.is_some(), node.unreachable_since_ms.is_none());
        if node.start(self.now_ms).is_ok() {
            self.counts.late_nodes += u64::from(is_first);
            self.counts.returned += u64::from(is_kept && !is_first);
            self.counts.renewed += u64::from(!is_kept && !is_first);
        }
    }

    fn kill_node(&mut self, index: usize) {
        self.counts.node_kills += u64::from(self.nodes[index].is_running);
        self.nodes[index].kill(self.now_ms);
    }

    /// Kills a host twice. Another host that has seen the first death lists no hosts meanwhile.
    fn die_twice(&mut self, index: usize) -> Result<(), String> {
        let other = (index + 1) % self.machines.len();
        self.kill_host(index, true);
        self.recover(other, false)?;
        self.start_host(index, None)?;
        let ms = 500 + self.rng.below(12_000);
        self.pass_time(ms, |_| true)?;
        self.kill_host(index, true);
        self.recover(other, false)
    }

    fn kill_host(&mut self, index: usize, is_resumed: bool) {
        let Some(host) = &self.machines[index].host else { return };
        let lease = host.lease;
        self.end_host(index, is_resumed);
        // In half of the cases the lease ends at once, as if it had ended in the directory before.
        if self.rng.chance(1, 2) {
            let _was_ended = self.direct.lease_revoke(lease.id);
        }
        self.note_deaths();
    }

    /// Stops a host's process or suspends its machine, or resumes both.
    fn stop_or_continue(&mut self, index: usize) {
        let is_suspension = self.rng.chance(1, 3);
        let machine = &mut self.machines[index];
        if machine.is_halted() {
            (machine.is_stopped, machine.is_suspended) = (false, false);
        } else if is_suspension {
            machine.is_suspended = true;
            self.counts.suspensions += 1;
        } else if machine.host.is_some() {
            machine.is_stopped = true;
            self.counts.stops += 1;
        }
    }

    /// A number below 6.
    fn small(&mut self) -> u32 {
        u32::try_from(self.rng.below(6)).unwrap()
    }

    fn fault(&mut self) -> CallFault {
        if self.rng.chance(1, 2) { CallFault::Lost } else { CallFault::AnswerLost }
    }

    /// Loses one of the next requests of a host or node to the directory, or the answer to it.
    fn lose_call(&mut self, host: usize, node: usize) {
        let fault = self.fault();
        let count = 1 + self.small();
        let directory = match &self.machines[host].host {
            Some(host) if self.rng.chance(3, 4) => &host.directory,
            _ => &self.nodes[node].directory,
        };
        directory.fail(count, fault);
        self.counts.lost_calls += 1;
    }

    /// Cuts a host, a node or all of them off from the directory, or stops the directory. Ends the
    /// cut or the stop if there is one.
    fn cut_or_heal(&mut self, host: usize, node: usize) {
        match self.rng.below(5) {
            0 => {
                self.all_cut = !self.all_cut;
                self.counts.all_cut += u64::from(self.all_cut);
            }
            1 => {
                self.is_directory_stopped = !self.is_directory_stopped;
                self.counts.directory_stops += u64::from(self.is_directory_stopped);
            }
            2 => self.nodes[node].is_cut = !self.nodes[node].is_cut,
            _ => self.machines[host].is_cut = !self.machines[host].is_cut,
        }
        self.apply_cuts();
    }
}
