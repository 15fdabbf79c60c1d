//! Podman as a user runs it: manifests of Kubernetes and Compose files, written for the reference
//! image, start pods of ours. Windows comes from a fake Microsoft.
#![forbid(unsafe_code)]

#[path = "kube/compose.rs"]
mod compose;
#[path = "kube/host.rs"]
mod host;
#[path = "kube/manifests.rs"]
mod manifests;

use std::cell::LazyCell;
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::anyhow;
use transom_tests::engine;
use transom_tests::lab::Lab;
use transom_tests::program::not_run;
use transom_tests::suite::{Suite, Test};

use self::host::Host;

/// The host of all tests, made for the first.
type SharedHost = Rc<LazyCell<anyhow::Result<Host>>>;
type Body = Box<dyn Fn(&Host) -> anyhow::Result<()>>;

fn main() -> ExitCode {
    let host: SharedHost = Rc::new(LazyCell::new(Host::new));
    // The suite `image` starts manifests under Podman by default, and `rehearsal` follows an
    // installation to the desktop.
    let mut tests = vec![
        test(&host, "the_manifests_of_a_user_start", Box::new(manifests::start)).thorough(),
        test(&host, "the_manifests_of_a_user_install", Box::new(manifests::install)).thorough(),
    ];
    for file in compose::FILES {
        let name = format!("the_compose_file_of_{file}_starts").replace('-', "_");
        let test = test(&host, &name, Box::new(move |host| compose::starts(host, file)));
        // The suite `image` starts the entry point of the reference image, and `reference` plans
        // all files, with their warnings.
        tests.push(test.thorough());
    }
    // The manifests ask for a machine with 4 GiB.
    Suite { lab: Lab { mib: 8192, seconds: 1800, assets: &[] }, tests }.main_after(host::prepare)
}

fn test(host: &SharedHost, name: &str, body: Body) -> Test {
    let (host, called) = (host.clone(), name.to_owned());
    Test::new(name, move || {
        if let Err(why) = engine::is_here() {
            not_run(&called, why);
            return Ok(());
        }
        body((**host).as_ref().map_err(|error| anyhow!("{error:#}"))?)
    })
}
