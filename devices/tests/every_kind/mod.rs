//! A bench with a device of each kind of the registry.

use std::path::Path;

use devices::registry::Config;
use devices::testutil::Bench;
use serde_json::{Value, json};

/// Fields that a kind cannot do without, and how to make what they name in a folder.
type Fields = fn(&Path) -> Value;

/// The kinds that are not built from their defaults.
const MINIMAL: &[(&str, Fields)] = &[];

/// The configuration of a kind with nothing in it but what it cannot do without.
fn minimal(kind: &str, folder: &Path) -> Config {
    let fields = MINIMAL.iter().find(|it| it.0 == kind).map_or(json!({}), |it| it.1(folder));
    match Config::of_kind(kind, fields) {
        Some(Ok(config)) => config,
        Some(Err(error)) => panic!(
            "`{kind}` is not built from its defaults ({error}): give it its fields in MINIMAL"
        ),
        None => panic!("there is no `{kind}`"),
    }
}

/// Adds a device of this kind.
pub(crate) fn add(bench: &mut Bench, kind: &str, folder: &Path) {
    let config = minimal(kind, folder);
    if let Err(error) = bench.board.add(kind, |place| config.build(place)) {
        panic!("`{kind}` cannot be built: {error:#}");
    }
}
