//! The Kubernetes manifests, checked against their schema, and the restricted profile against Pod
//! Security.
#![forbid(unsafe_code)]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use container::ask;
use container::settings::environment;
use container::settings::host::Host;
use container::settings::settle::settle;
use serde_json::{Value, json};
use transom_tests::program::not_run;
use transom_tests::python::{PYTHON, fetch};

/// The folder of the manifests.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes")
}

/// Whether the schema checker is installed. Reports the test as skipped otherwise.
fn runs_here(test: &str) -> bool {
    let mut asked = Command::new(PYTHON);
    asked.args(["-c", "import jsonschema, pkg_resources, pip, yaml"]);
    let here = asked.stdout(Stdio::null()).stderr(Stdio::null()).status();
    let here = here.is_ok_and(|it| it.success());
    if !here {
        not_run(
            test,
            "python3-jsonschema, python3-pip, python3-pkg-resources or python3-yaml is missing",
        );
    }
    here
}

/// Checks the manifests in a text against their schema, and parses them.
fn read(text: &str) -> Result<Vec<Value>> {
    let modules = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kubernetes-validate");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests");
    fetch(&folder.join("requirements.txt"), &modules)?;
    let mut python = Command::new(PYTHON);
    python.arg(folder.join("check.py")).env("PYTHONPATH", modules);
    python.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = python.spawn()?;
    child.stdin.take().context("a pipe")?.write_all(text.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The manifests of a profile, assembled as `kubectl apply -k` does.
fn render(profile: &Path) -> Result<Option<Vec<Value>>> {
    let output = Command::new("kubectl").arg("kustomize").arg(profile).output();
    let Ok(output) = output else { return Ok(None) };
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {error}", profile.display());
    let text = String::from_utf8(output.stdout)?;
    read(&text).with_context(|| profile.display().to_string()).map(Some)
}

fn find<'a>(all: &'a [Value], kind: &str) -> Result<&'a Value> {
    all.iter().find(|it| it["kind"] == kind).with_context(|| format!("no {kind}"))
}

/// Checks a pod for Pod Security level "restricted".
fn is_restricted(pod: &Value) -> Result<()> {
    for field in ["hostNetwork", "hostPID", "hostIPC"] {
        ensure!(pod[field].as_bool() != Some(true), "{field}");
    }
    ensure!(pod["securityContext"]["runAsNonRoot"] == true, "runAsNonRoot");
    ensure!(pod["securityContext"]["runAsUser"].as_u64() > Some(0), "runAsUser");
    ensure!(pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", "seccomp");
    let safe = [
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_syncookies",
    ];
    let sysctls = pod["securityContext"]["sysctls"].as_array().into_iter().flatten();
    for name in sysctls.map(|it| it["name"].as_str().unwrap_or_default()) {
        ensure!(safe.contains(&name), "{name}");
    }
    let allowed = [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    for volume in pod["volumes"].as_array().context("volumes")? {
        let mut kinds = volume.as_object().context("a volume")?.keys().filter(|it| *it != "name");
        ensure!(kinds.all(|kind| allowed.contains(&kind.as_str())), "{volume}");
    }
    for container in pod["containers"].as_array().context("containers")? {
        let rights = &container["securityContext"];
        ensure!(rights["allowPrivilegeEscalation"] == false, "allowPrivilegeEscalation");
        ensure!(rights["privileged"].as_bool() != Some(true), "privileged");
        ensure!(rights["capabilities"]["drop"] == json!(["ALL"]), "capabilities");
        ensure!(rights["capabilities"].get("add").is_none(), "capabilities");
        ensure!(
            container["ports"]
                .as_array()
                .is_none_or(|all| { all.iter().all(|port| port.get("hostPort").is_none()) }),
            "hostPort"
        );
    }
    Ok(())
}

#[test]
fn each_manifest_matches_its_schema() -> Result<()> {
    if !runs_here("manifests against the schema") {
        return Ok(());
    }
    let mut texts = vec![fs::read_to_string(folder().join("fleet/service.yaml"))?];
    for part in ["base", "egress", "monitor"] {
        for file in fs::read_dir(folder().join(part))? {
            texts.push(fs::read_to_string(file?.path())?);
        }
    }
    let all = read(&texts.join("\n---\n"))?;
    let kinds: Vec<_> = all.iter().filter_map(|it| it["kind"].as_str()).collect();
    for kind in ["Deployment", "Ingress", "NetworkPolicy", "PodMonitor", "Secret", "Service"] {
        ensure!(kinds.contains(&kind), "no {kind} among {kinds:?}");
    }
    // The checker rejects an unknown field.
    let wrong = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {prots: []}\n";
    ensure!(read(wrong).is_err(), "an unknown field was accepted");
    Ok(())
}

/// The object of a kind in the manifests of a folder.
fn one(part: &str, kind: &str) -> Result<Value> {
    let mut texts = Vec::new();
    for file in fs::read_dir(folder().join(part))? {
        texts.push(fs::read_to_string(file?.path())?);
    }
    Ok(find(&read(&texts.join("\n---\n"))?, kind)?.clone())
}

#[test]
fn the_pod_monitor_uses_the_screen_password() -> Result<()> {
    if !runs_here("the monitor's password") {
        return Ok(());
    }
    let (monitor, secret) = (one("monitor", "PodMonitor")?, one("base", "Secret")?);
    let deployment = one("base", "Deployment")?;
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let words = &monitor["spec"]["podMetricsEndpoints"][0]["basicAuth"];
    for (word, variable) in [("username", "USERNAME"), ("password", "PASSWORD")] {
        let [name, key] = ["name", "key"].map(|it| words[word][it].as_str().unwrap_or_default());
        ensure!(secret["metadata"]["name"] == name, "{word}: {words}");
        ensure!(secret["stringData"][key].is_string(), "{word}: {secret} has no {key}");
        // The pod gets the same value.
        let env = container["env"].as_array().context("env")?.iter();
        let told = env.clone().find(|it| it["name"] == variable).context(variable)?;
        ensure!(told["valueFrom"]["secretKeyRef"] == words[word], "{told} and {words}");
    }
    Ok(())
}

#[test]
fn kubernetes_probes_run_commands() -> Result<()> {
    if !runs_here("probes") {
        return Ok(());
    }
    let deployment = one("base", "Deployment")?;
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    for (probe, word) in
        [("startupProbe", "started"), ("livenessProbe", "live"), ("readinessProbe", "ready")]
    {
        let probe = &container[probe];
        let command = serde_json::json!(["transom", "probe", word]);
        ensure!(probe["exec"]["command"] == command, "{probe}");
        // The probe of a remote desktop waits two seconds for an answer, and a busy host may be
        // slow.
        ensure!(probe["timeoutSeconds"].as_u64() >= Some(5), "{probe}");
        ensure!(ask::PROBES.iter().any(|(it, _)| *it == word), "there is no probe {word}");
    }
    Ok(())
}

/// A quantity in `Gi` as bytes.
fn gibibytes(quantity: &Value) -> Result<u64> {
    let count = quantity.as_str().and_then(|it| it.strip_suffix("Gi"));
    Ok(count.with_context(|| format!("{quantity}: no Gi"))?.parse::<u64>()? << 30)
}

/// The storage that a claim requests.
fn storage_of(claim: &Value) -> &Value {
    &claim["spec"]["resources"]["requests"]["storage"]
}

#[test]
fn the_default_machine_fits_the_pod_and_volume_limits() -> Result<()> {
    if !runs_here("limits") {
        return Ok(());
    }
    let deployment = one("base", "Deployment")?;
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let env = container["env"].as_array().context("env")?.iter();
    let words = env.filter_map(|it| Some((it["name"].as_str()?, it["value"].as_str()?)));
    let words = words.map(|(name, value)| (name.into(), value.into())).collect();
    let volume = gibibytes(storage_of(&one("base", "PersistentVolumeClaim")?))?;
    let host = Host {
        processors: 2,
        free: 64 << 30,
        // The pod's own programs already use some memory.
        memory: gibibytes(&container["resources"]["limits"]["memory"])? - (128 << 20),
        // An ISO and the file system itself already use some space.
        free_space: Some(volume - (15 << 29)),
        ..Host::default()
    };
    let input = environment::read(&words)?;
    let (sizes, notes) = settle(&input, &host)?;
    ensure!(notes.is_empty() && sizes.memory == 4 << 30, "{sizes:?}, {notes:?}");
    ensure!(
        host.free_space >= Some(sizes.disk),
        "a volume of {volume} bytes is too small for {}",
        sizes.disk
    );
    Ok(())
}

#[test]
fn the_service_is_reachable_during_an_installation() -> Result<()> {
    if !runs_here("the service's addresses") {
        return Ok(());
    }
    // The pod is ready once a remote desktop answers, long after the screen appears.
    let service = one("base", "Service")?;
    ensure!(service["spec"]["publishNotReadyAddresses"] == true, "{service}");
    let ingress = one("base", "Ingress")?;
    let behind = &ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"];
    ensure!(*behind == service["metadata"]["name"], "{ingress}");
    Ok(())
}

#[test]
fn the_egress_policy_allows_only_public_networks() -> Result<()> {
    if !runs_here("the guest's ways out") {
        return Ok(());
    }
    let policy = &one("egress", "NetworkPolicy")?["spec"];
    // The policy is about the guest's outgoing traffic; the profiles decide which ports are open.
    ensure!(policy["policyTypes"] == serde_json::json!(["Egress"]), "{policy}");
    let rules = policy["egress"].as_array().context("egress")?.iter();
    let (dns, rest): (Vec<_>, Vec<_>) = rules.partition(|it| it.get("ports").is_some());
    let blocks = |rule: &Value| {
        let to = rule["to"].as_array().into_iter().flatten();
        to.filter_map(|it| it.get("ipBlock").cloned()).collect::<Vec<_>>()
    };
    ensure!(dns.iter().flat_map(|it| blocks(it)).any(|it| it["cidr"] == "169.254.0.0/16"));
    let rest: Vec<_> = rest.iter().flat_map(|it| blocks(it)).collect();
    for (all, private) in [
        ("0.0.0.0/0", &["10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"][..]),
        ("::/0", &["fc00::/7", "fe80::/10"]),
    ] {
        let block = rest.iter().find(|it| it["cidr"] == all).context(all)?;
        let except = block["except"].as_array().context("except")?;
        ensure!(private.iter().all(|it| except.iter().any(|block| block == it)), "{block}");
    }
    Ok(())
}

#[test]
fn profiles_render_to_the_expected_pods() -> Result<()> {
    const TEST: &str = "profiles put together by kustomize";
    if !runs_here(TEST) {
        return Ok(());
    }
    let mut pods = Vec::new();
    for (profile, kind) in [
        ("restricted", "Deployment"),
        ("tap", "Deployment"),
        ("compat", "Deployment"),
        ("fleet", "StatefulSet"),
        ("clones", "StatefulSet"),
        ("running", "StatefulSet"),
    ] {
        let Some(all) = render(&folder().join(profile))? else {
            not_run(TEST, "there is no kubectl");
            return Ok(());
        };
        let owner = find(&all, kind)?;
        let policy =
            &find(&all, "Namespace")?["metadata"]["labels"]["pod-security.kubernetes.io/enforce"];
        let pod = owner["spec"]["template"]["spec"].clone();
        let strict = is_restricted(&pod);
        if policy == "restricted" {
            strict.with_context(|| profile.to_owned())?;
        } else {
            ensure!(
                strict.is_err(),
                "{profile} is restricted, but its namespace enforces {policy}"
            );
        }
        let narrowed = find(&all, "NetworkPolicy").is_ok();
        ensure!(narrowed == (profile != "compat"), "{profile} has a NetworkPolicy: {narrowed}");
        ensure!(pod["terminationGracePeriodSeconds"].as_u64() > Some(105), "{profile}: {pod}");
        pods.push((profile, owner.clone(), pod));
    }
    let added = |at: usize| {
        let added = &pods[at].2["containers"][0]["securityContext"]["capabilities"]["add"];
        added.as_array().is_some_and(|all| all.iter().any(|it| it == "NET_ADMIN"))
    };
    ensure!(added(1) && !added(0) && !added(3), "only the profile `tap` adds NET_ADMIN");
    // Two machines must never write to the same disk.
    ensure!(pods[0].1["spec"]["strategy"]["type"] == "Recreate", "{}", pods[0].1);
    let fleet = &pods[3].1["spec"];
    let claims = fleet["volumeClaimTemplates"].as_array().context("no volumes of their own")?;
    let name = &claims.first().context("no volume")?["metadata"]["name"];
    let mounts = fleet["template"]["spec"]["containers"][0]["volumeMounts"].as_array();
    let one = one("base", "PersistentVolumeClaim")?;
    ensure!(storage_of(&claims[0]) == storage_of(&one), "{claims:?}");
    let mount = mounts.and_then(|all| all.iter().find(|it| it["name"] == *name));
    ensure!(mount.is_some_and(|it| it["mountPath"] == "/storage"), "{fleet}");
    reads_its_base(&pods[4].2, "")?;
    reads_its_base(&pods[5].2, "/windows.snapshots/ready")
}

/// All machines of the profiles with a base read one volume, which none of them can write.
fn reads_its_base(pod: &Value, place: &str) -> Result<()> {
    let named = |list: &Value, name: &str| -> Result<Value> {
        let all = list.as_array().with_context(|| format!("no list: {list}"))?;
        let found = all.iter().find(|it| it["name"] == name);
        found.cloned().with_context(|| format!("no {name} in {list}"))
    };
    let container = &pod["containers"][0];
    let claim = &named(&pod["volumes"], "base")?["persistentVolumeClaim"];
    ensure!(claim["claimName"] == "windows-base" && claim["readOnly"] == true, "{claim}");
    let mount = named(&container["volumeMounts"], "base")?;
    ensure!(mount["readOnly"] == true, "{mount}");
    let place = mount["mountPath"].as_str().map(|it| format!("{it}{place}"));
    let variables = &container["env"];
    ensure!(named(variables, "BASE")?["value"].as_str() == place.as_deref(), "{container}");
    // Clones of a running machine have its address.
    ensure!(named(variables, "NETWORK")?["value"] == "user", "{container}");
    Ok(())
}

/// The manifests of the profile `tap` with a component. Nothing without kubectl.
fn with_component(component: &str) -> Result<Option<Vec<Value>>> {
    let own = tempfile::tempdir()?;
    for part in ["base", "egress", "tap", component] {
        let (from, to) = (folder().join(part), own.path().join(part));
        fs::create_dir(&to)?;
        for file in fs::read_dir(from)? {
            let file = file?;
            fs::copy(file.path(), to.join(file.file_name()))?;
        }
    }
    let mine = own.path().join("mine");
    fs::create_dir(&mine)?;
    let text = format!("resources: [../tap]\ncomponents: [../{component}]\n");
    fs::write(mine.join("kustomization.yaml"), text)?;
    render(&mine)
}

#[test]
fn a_component_lets_the_machine_move() -> Result<()> {
    const TEST: &str = "the component for migration beside a profile";
    if !runs_here(TEST) {
        return Ok(());
    }
    let Some(all) = with_component("migrate")? else {
        not_run(TEST, "there is no kubectl");
        return Ok(());
    };
    let deployment = &find(&all, "Deployment")?["spec"];
    let strategy = json!({
        "type": "RollingUpdate",
        "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 1 },
    });
    ensure!(deployment["strategy"] == strategy, "{deployment}");
    let pod = &deployment["template"];
    let variables = pod["spec"]["containers"][0]["env"].as_array().context("variables")?;
    let variable = |name: &str| variables.iter().find(|it| it["name"] == name);
    let value = |name: &str| variable(name).and_then(|it| it["value"].as_str()).context("a value");
    ensure!(value("SHUTDOWN")? == "migrate", "{variables:?}");
    let timeout: u64 = value("TIMEOUT")?.parse()?;
    let grace = pod["spec"]["terminationGracePeriodSeconds"].as_u64();
    ensure!(grace > Some(timeout), "{timeout} s of {grace:?} s");
    let claim = &find(&all, "PersistentVolumeClaim")?["spec"];
    ensure!(claim["accessModes"] == json!(["ReadWriteMany"]), "{claim}");
    let is_own = |it: &&Value| it["metadata"]["name"] == "windows-migrate";
    let policy = all.iter().find(is_own).context("no policy")?;
    let rule = &policy["spec"]["egress"][0];
    let port = container::settings::Settings::defaults().pod.migration.port.0;
    ensure!(rule["ports"][0]["port"] == port, "{rule}");
    let pods = &rule["to"][0]["podSelector"]["matchLabels"];
    ensure!(*pods == pod["metadata"]["labels"], "{rule}");
    Ok(())
}

#[test]
fn the_monitor_can_be_combined_with_a_profile() -> Result<()> {
    const TEST: &str = "the monitor beside a profile";
    if !runs_here(TEST) {
        return Ok(());
    }
    let Some(all) = with_component("monitor")? else {
        not_run(TEST, "there is no kubectl");
        return Ok(());
    };
    let monitor = &find(&all, "PodMonitor")?["spec"];
    let pod = &find(&all, "Deployment")?["spec"]["template"];
    ensure!(monitor["selector"]["matchLabels"] == pod["metadata"]["labels"], "{monitor}");
    let port = &monitor["podMetricsEndpoints"][0]["port"];
    let ports = pod["spec"]["containers"][0]["ports"].as_array().context("ports")?;
    ensure!(ports.iter().any(|it| it["name"] == *port), "{monitor}");
    Ok(())
}
