//! The agent in the guest, through the machine's own port: the programs that it runs, what it
//! tells, and that it may end and start at any time.

use std::io::Write as _;
use std::process::Output;

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use transom_tests::program::number;

use super::pod::{BOOT, Pod};
use super::town::{SOON, Town};

/// A guest that is told this by fw_cfg has an agent, and does not obey its button.
pub(crate) const HEARS: &str = "ARGUMENTS=-fw_cfg name=opt/transom/hears,string=agent";
/// What that guest calls itself.
const SYSTEM: &str = "the guest of a pod";
/// Bytes that a program writes.
const MUCH: usize = 300_000;

/// All that is true of an agent while it runs.
pub(crate) fn serves(town: &Town, pod: &mut Pod) -> anyhow::Result<()> {
    let news = format!("the guest's agent answers: it is {SYSTEM}");
    pod.says(&news, 1, BOOT)?;
    let script = "cat; echo \"$1\"; echo err >&2; exit 7";
    let mut program = pod.start_transom(&["exec", "-i", "--", "sh", "-c", script, "sh", "a b"])?;
    program.stdin.take().context("its input")?.write_all(b"in\n")?;
    let ran = says(&program.wait_with_output()?);
    ensure!(ran == (7, "in\na b\n".into(), "err\n".into()), "{ran:?}");
    let ran = pod.transom(&["exec", "head", "-c", &MUCH.to_string(), "/dev/zero"])?;
    ensure!(ran.status.success() && ran.stdout == vec![0; MUCH], "{} bytes", ran.stdout.len());
    let (status, out, err) = says(&pod.transom(&["exec", "/no/such/program"])?);
    ensure!(status == 127 && out.is_empty() && err.lines().count() == 1, "{status} {out} {err}");
    knows_the_guest(town, pod).context("what it tells")
}

/// What it tells of the guest is told on.
fn knows_the_guest(town: &Town, pod: &Pod) -> anyhow::Result<()> {
    let status = pod.exec(&["/transom/transom", "status"])?;
    let status: Value = serde_json::from_str(&status)?;
    let guest = &status["agent"];
    ensure!(guest["system"] == SYSTEM, "{status}");
    let own = pod.guest(town, "ip addr show dev eth0")?;
    let addresses = guest["addresses"].as_array().context("no addresses")?;
    for address in addresses {
        let address = format!(" {}/", address.as_str().unwrap_or_default());
        ensure!(own.contains(&address), "{address} is not the guest's: {own}");
    }
    ensure!(!addresses.is_empty(), "{status}");
    let key = BASE64_STANDARD.encode("ada:a long word");
    let key = format!("Authorization: Basic {key}\r\n");
    let (code, answer) = pod.page_with(town, "/api/v1/state", &key)?;
    let state = answer.split_once("\r\n\r\n").context("no body")?.1;
    let state: Value = serde_json::from_str(state).with_context(|| answer.clone())?;
    ensure!(code == 200 && &state["agent"] == guest, "{answer}");
    Ok(())
}

/// It ends, while a program runs that it has started, and starts again. A guest without a remote
/// desktop serves as long as it answers.
pub(crate) fn comes_again(town: &Town, pod: &mut Pod) -> anyhow::Result<()> {
    let went = pod.said("the guest's agent does not answer any more");
    // It goes on in the guest, and nobody knows what becomes of it.
    let program = pod.start_transom(&["exec", "tail", "-f", "/dev/null"])?;
    pod.waits(|pod| Ok(!pod.guest(town, "pidof tail")?.is_empty()))?;
    let said = pod.guest(town, "kill $(cat /run/desktop.pid) && killall qemu-ga")?;
    ensure!(said.is_empty(), "{said}");
    pod.until(town, ("/readyz", 503), SOON)?;
    let (status, said) = pod.page(town, "/readyz")?;
    ensure!(status == 503 && said.contains("3389"), "{said}");
    let (status, out, err) = says(&pod.transom(&["exec", "true"])?);
    ensure!(status == 125 && out.is_empty(), "{status} {out} {err}");
    ensure!(err.lines().count() == 1 && err.contains("qemu-guest-agent"), "{err}");
    pod.says("the guest's agent does not answer any more", went + 1, SOON)?;
    pod.guest(town, "/agent.sh &")?;
    pod.until(town, ("/readyz", 200), SOON)?;
    let ran = says(&pod.transom(&["exec", "echo", "here"])?);
    ensure!(ran == (0, "here\n".into(), String::new()), "{ran:?}");
    // This agent has not started that program.
    let (status, _, err) = says(&program.wait_with_output()?);
    ensure!(status == 125 && err.lines().count() == 1, "{status} {err}");
    Ok(())
}

/// It is there after the guest has started anew.
pub(crate) fn is_back(pod: &mut Pod) -> anyhow::Result<()> {
    pod.waits(|pod| Ok(pod.transom(&["exec", "true"])?.status.success()))?;
    // What was there before went with the guest's memory.
    let (status, _, err) = says(&pod.transom(&["exec", "test", "-e", "/data"])?);
    ensure!(status == 1, "{status} {err}");
    Ok(())
}

fn says(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (number(output.status), text(&output.stdout), text(&output.stderr))
}
