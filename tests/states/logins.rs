//! Browsers stay logged in over a new start of the container, unless they log out, the password
//! changes, or the container is killed.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use anyhow::{Context as _, Result, ensure};
use transom_tests::place::{HERE, until};
use transom_tests::program::{PATIENCE, Running};

use super::runs_here;
use super::world::{Files, World};

/// A machine that is off when a file appears, or when its pod is killed.
const UNTIL_STOPPED: &str = "while [ ! -e stop ] && kill -0 $PPID; do sleep 0.1; done";

/// Starts a pod, and waits for its page.
fn start(world: &World, password: &str) -> Result<Running> {
    let words = [("WEB", "Y"), ("PASS", password)];
    let pod = world.start("rm -f /mnt/stop", &words)?;
    until("the web port does not open", || Ok(world.place.connect(HERE, 8006).is_ok()))?;
    Ok(pod)
}

fn stop(world: &World, mut pod: Running) -> Result<()> {
    fs::write(world.volume().join("stop"), "")?;
    let status = pod.wait(PATIENCE)?;
    ensure!(status == 0, "{status}: {}", pod.stderr.text());
    Ok(())
}

/// Sends a form, with a cookie if there is one. Returns the cookie that the answer sets.
fn post(world: &World, page: &str, form: &str, cookie: &str) -> Result<String> {
    let answer = world.place.say(
        HERE,
        &format!(
            "POST /{page} HTTP/1.1\nHost: localhost\nOrigin: http://localhost\nCookie: {cookie}\n\
             Content-Type: application/x-www-form-urlencoded\nContent-Length: {}\n\
             Connection: close\n\n{form}",
            form.len()
        ),
    )?;
    let set = answer.lines().find_map(|it| it.strip_prefix("set-cookie: "));
    let set = set.with_context(|| answer.clone())?;
    Ok(set.split(';').next().unwrap_or_default().to_owned())
}

fn is_logged_in(world: &World, cookie: &str) -> Result<bool> {
    let answer = world.place.say(
        HERE,
        &format!("GET /session HTTP/1.1\nHost: localhost\nCookie: {cookie}\nConnection: close\n\n"),
    )?;
    let yes = answer.starts_with("HTTP/1.1 200 ");
    ensure!(yes || answer.starts_with("HTTP/1.1 401 "), "{answer}");
    Ok(yes)
}

#[test]
fn browsers_stay_logged_in_over_a_new_start() -> Result<()> {
    if !runs_here("browsers_stay_logged_in_over_a_new_start") {
        return Ok(());
    }
    let files = Files::make()?;
    let world = World::new(&files)?;
    world.run("cp $D/installed data.img; : > windows.boot")?;
    world.guest(UNTIL_STOPPED)?;
    let kept = world.volume().join("windows.sessions");
    let log_in = || post(&world, "login", "user=Docker&password=first", "");

    let pod = start(&world, "first")?;
    let (stays, leaves) = (log_in()?, log_in()?);
    ensure!(is_logged_in(&world, &stays)? && is_logged_in(&world, &leaves)?, "no login");
    stop(&world, pod)?;
    let text = fs::read_to_string(&kept)?;
    let secret = stays.split('=').nth(1).context("a cookie")?;
    ensure!(text.lines().count() == 2 && !text.contains(secret), "{text}");
    ensure!(fs::metadata(&kept)?.mode() & 0o777 == 0o600, "others may read it");

    let pod = start(&world, "first")?;
    ensure!(fs::read_to_string(&kept)?.is_empty(), "sessions stay in the file");
    ensure!(is_logged_in(&world, &stays)?, "it must log in again");
    post(&world, "logout", "", &leaves)?;
    stop(&world, pod)?;

    let mut pod = start(&world, "first")?;
    ensure!(is_logged_in(&world, &stays)?, "it must log in again");
    ensure!(!is_logged_in(&world, &leaves)?, "a logout did not hold");
    rustix::process::kill_process(pod.pid(), rustix::process::Signal::KILL)?;
    pod.wait(PATIENCE)?;

    let pod = start(&world, "first")?;
    ensure!(!is_logged_in(&world, &stays)?, "a kill keeps logins");
    let cookie = log_in()?;
    stop(&world, pod)?;
    let pod = start(&world, "second")?;
    ensure!(!is_logged_in(&world, &cookie)?, "another password is not needed");
    stop(&world, pod)
}
