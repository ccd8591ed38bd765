//! A hostile program of an ordinary user: `attacker ATTACK`. It exits with 0 if the attack was
//! repelled, and prints the agent's answer.

mod changed_user;
mod control;
mod descriptors;
mod exhaustion;
mod fuse;
mod identity;
mod page_cache;
mod segments;
mod stranger;
mod sys;

use std::process::ExitCode;

fn main() -> ExitCode {
    let attack = std::env::args().nth(1).unwrap_or_default();
    let repelled = match attack.as_str() {
        "foreign-userfaultfd" => identity::foreign_userfaultfd(),
        "clear-nonblocking" => identity::clear_nonblocking(),
        "hold-up-monitors" => identity::hold_up_monitors(),
        "changed-user" => changed_user::changed_user(),
        "kept-segments" => segments::kept_segments(),
        "locked-segments" => segments::locked_segments(),
        "locked-cache" => descriptors::locked_cache(),
        "locked-memories" => descriptors::locked_memories(),
        "lingering-sockets" => descriptors::lingering_sockets(),
        "inherited-file" => descriptors::inherited_file(),
        "waiting-files" => descriptors::waiting_files(),
        "overwrite-control" => control::overwrite(),
        "overwrite-control-and-wait" => control::overwrite_and_wait(),
        "fill" => exhaustion::fill(),
        "fill-by-extents" => exhaustion::fill_by_extents(),
        "use-up-descriptors" => exhaustion::use_up_descriptors(),
        "read-cached-pages" => page_cache::read(),
        "sparse" => exhaustion::sparse(),
        "listen" => stranger::listen(),
        _ => panic!("there is no attack {attack}"),
    };
    if repelled { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
