//! The agent in the guest, through the machine's own port: the programs that it runs, the facts
//! that it reports, and its right to end and start at any time.

use std::io::Write as _;
use std::process::Output;

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use transom_tests::program::number;

use super::pod::{BOOT, Pod};
use super::town::{SOON, Town};

/// With this fw_cfg value, the guest has an agent and ignores the power button.
pub(crate) const HEARS: &str = "ARGUMENTS=-fw_cfg name=opt/transom/hears,string=agent";
/// The system name that this guest's agent reports.
const SYSTEM: &str = "the guest of a pod";
/// Bytes that a program in the guest writes.
const MUCH: usize = 300_000;

/// Checks a running agent: exit statuses, input, output, and reported facts.
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
    knows_the_guest(town, pod).context("the agent's report on the guest")
}

/// The pod's status and API repeat the facts that the agent reports.
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

/// The agent ends while one of its programs runs, and starts again. While the guest has no remote
/// desktop, the pod is ready only as long as the agent answers.
pub(crate) fn comes_again(town: &Town, pod: &mut Pod) -> anyhow::Result<()> {
    let went = pod.said("the guest's agent does not answer any more");
    // The program continues in the guest, but its exit status is lost.
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
    // The new agent did not start that program, and cannot report its exit status.
    let (status, _, err) = says(&program.wait_with_output()?);
    ensure!(status == 125 && err.lines().count() == 1, "{status} {err}");
    Ok(())
}

/// The agent answers after the guest has restarted.
pub(crate) fn is_back(pod: &mut Pod) -> anyhow::Result<()> {
    pod.waits(|pod| Ok(pod.transom(&["exec", "true"])?.status.success()))?;
    // The file from before was in the guest's memory, and is gone.
    let (status, _, err) = says(&pod.transom(&["exec", "test", "-e", "/data"])?);
    ensure!(status == 1, "{status} {err}");
    Ok(())
}

fn says(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (number(output.status), text(&output.stdout), text(&output.stderr))
}
