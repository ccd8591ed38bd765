//! `aquifer kv`: key-value stores in heaps of objects.

mod arguments;

use std::error::Error;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::ExitCode;

use aquifer_kv::KvStore;
use aquifer_kv::catalog::Catalog;
use aquifer_objects::client::HeapClient;

use crate::cli::PassedArguments;
use crate::say::{record_write, say_line};
use crate::{Outcome, bench_binary};

pub use arguments::{KvArguments, KvCommand};

/// Default number of keys of a store.
const KEYS_DEFAULT: u64 = 100_000;

type Store = KvStore<HeapClient>;

/// Executes a command.
pub fn kv(state: Option<&Path>, arguments: KvArguments) -> Outcome {
    let KvArguments { agent, node, store, command } = arguments;
    let agent = agent.socket(state)?;
    let connect = || HeapClient::connect_at(agent.clone(), node);
    match command {
        KvCommand::Put { key, value } => {
            let value = value.map_or_else(read_input, |value| Ok(value.into_vec()))?;
            Store::open_or_create(connect()?, &store, KEYS_DEFAULT)?.put(key.as_bytes(), &value)?;
            Ok(ExitCode::SUCCESS)
        }
        KvCommand::Get { key } => get(&mut Store::open(connect()?, &store)?, key.as_bytes()),
        KvCommand::Del { keys } => delete(&mut Store::open(connect()?, &store)?, &keys),
        KvCommand::Scan { prefix, limit, values } => {
            let prefix = prefix.unwrap_or_default();
            scan(&mut Store::open(connect()?, &store)?, prefix.as_bytes(), limit, values)
        }
        KvCommand::Create { keys } => {
            Store::create(&mut connect()?, &store, keys)?;
            Ok(ExitCode::SUCCESS)
        }
        KvCommand::Drop => {
            Store::drop_store(connect()?, &store)?;
            Ok(ExitCode::SUCCESS)
        }
        KvCommand::List => {
            for (name, _) in Catalog::read(&mut connect()?)?.stores {
                say_line!("{name}");
            }
            Ok(ExitCode::SUCCESS)
        }
        KvCommand::Bench(passed) => {
            let arguments = std::iter::once(OsString::from("kv")).chain(passed.arguments).collect();
            bench_binary::exec("bench", None, &PassedArguments { arguments })
        }
    }
}

fn read_input() -> Result<Vec<u8>, Box<dyn Error>> {
    let mut value = Vec::new();
    std::io::stdin()
        .lock()
        .read_to_end(&mut value)
        .map_err(|error| format!("cannot read the value: {error}"))?;
    Ok(value)
}

fn get(store: &mut Store, key: &[u8]) -> Outcome {
    let Some(value) = store.get(key)? else { return Err(no_value(key)) };
    let mut out = std::io::stdout().lock();
    record_write(out.write_all(&value));
    // On a terminal the shell's prompt must begin on a new line. Files and pipes get the value
    // unchanged.
    if rustix::termios::isatty(&out) && !value.ends_with(b"\n") {
        record_write(out.write_all(b"\n"));
    }
    Ok(ExitCode::SUCCESS)
}

fn delete(store: &mut Store, keys: &[OsString]) -> Outcome {
    let mut missing = None;
    for key in keys {
        if !store.delete(key.as_bytes())? {
            missing = missing.or(Some(key));
        }
    }
    match missing {
        Some(key) => Err(no_value(key.as_bytes())),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn no_value(key: &[u8]) -> Box<dyn Error> {
    format!("key `{}` has no value", escape(key)).into()
}

fn scan(store: &mut Store, prefix: &[u8], limit: Option<usize>, values: bool) -> Outcome {
    let mut left = limit.unwrap_or(usize::MAX);
    let mut next = Some(0);
    while let Some(bucket) = next.filter(|_| left > 0) {
        let (items, following) = store.scan(bucket)?;
        next = following;
        for (key, value) in items.into_iter().filter(|(key, _)| key.starts_with(prefix)).take(left) {
            left -= 1;
            match values {
                true => say_line!("{}\t{}", escape(&key), escape(&value)),
                false => say_line!("{}", escape(&key)),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The bytes as text on one line. Control characters, backslashes and invalid UTF-8 are escaped.
fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                character if character.is_control() => text.extend(character.escape_default()),
                character => text.push(character),
            }
        }
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_printed_on_one_line() {
        assert_eq!(escape("schlüssel\t\\x".as_bytes()), "schlüssel\\t\\\\x");
        assert_eq!(escape(b"a\nb\xff"), "a\\nb\\xff");
    }
}
