//! Memory that an item needs beside its key and its value.

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::items::{Items, KEY_BYTES, Lengths, Lifetime};
use super::load::Load;
use super::servers::{AQUIFER, Programs, Settings};

const CONNECTIONS: u32 = 4;
const MEMORY_MIB: u32 = 1024;
const VALUE_BYTES: usize = 100;
/// Columns: the growth from no items to all, and from half of the items to all.
const COLUMNS: [&str; 2] = ["bytes over, all items", "bytes over, second half"];

/// Measures with `keys` items.
///
/// # Errors
/// If a server cannot be used, or refuses an item.
pub fn table(
    programs: &Programs,
    keys: u32,
    on_server: &dyn Fn(&str),
) -> Result<(Table, Vec<Target>), BenchError> {
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for program in programs.compatible() {
        for (has_cas, option, bound) in [(true, "", 26.0), (false, " -C", 20.0)] {
            let name = format!("{}{option}", program.name);
            let settings = Settings { has_cas, ..Settings::with_memory(MEMORY_MIB) };
            let server = programs.start(program, settings)?;
            let items = Items::new(keys, Lengths::Fixed(VALUE_BYTES), Lifetime::Unlimited);
            let mut load = Load::connect(&server, CONNECTIONS, items)?;
            let empty = server.memory_bytes();
            load.set_all(0..keys / 2)?;
            let half = server.memory_bytes();
            load.set_all(keys / 2..keys)?;
            let full = server.memory_bytes();
            let over = |bytes: u64, items: u32| {
                let payload = float((KEY_BYTES + VALUE_BYTES) as u64);
                Spread::one(float(bytes) / f64::from(items) - payload)
            };
            let spreads = [over(full - empty, keys), over(full - half, keys - keys / 2)];
            targets.extend((program.name == AQUIFER).then(|| Target {
                name: format!("{name}: bytes over key and value"),
                value: spreads[0],
                bound,
                at_most: true,
            }));
            on_server(&name);
            rows.push(Row { name, figures: COLUMNS.into_iter().zip(spreads).collect() });
        }
    }
    let table = Table {
        title: format!("memory of an item of {KEY_BYTES} + {VALUE_BYTES} bytes, {keys} items"),
        columns: COLUMNS.map(Column::middle).to_vec(),
        pictured: Some(COLUMNS[0]),
        ratio: None,
        rows,
    };
    Ok((table, targets))
}
